"""Images, video and audio: their types, and encoding to and decoding from files."""
