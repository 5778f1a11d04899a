"""Parts that pages are drawn from: states, tables, links, forms."""
