"""What runs models in the model server; the only part of the room that imports an ML framework."""
