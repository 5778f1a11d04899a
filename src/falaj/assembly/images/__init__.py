"""Container images of the platform, of workers and of the model server: rendered, built, and written as archives."""
