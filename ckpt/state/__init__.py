"""What a training state is made of, and how each kind of object is saved and loaded."""
