"""What a model asks of the host, recorded once and replayed without Python."""
