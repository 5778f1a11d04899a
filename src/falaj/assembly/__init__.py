"""The wiring: falaj.toml to drivers to services. The only code that loads drivers."""
