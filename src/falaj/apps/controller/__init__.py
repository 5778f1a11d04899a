"""The controller process: durable work, one active controller by lease."""
