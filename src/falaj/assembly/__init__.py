"""The wiring: falaj.toml to drivers to rooms. The only code that loads drivers."""
