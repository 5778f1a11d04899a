"""Charts: pure functions from values to options of ECharts, and the element that draws them."""
