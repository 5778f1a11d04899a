"""Interfaces and processes: command line, REST API, controller, model server and their supervisor."""
