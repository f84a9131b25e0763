"""What an optimizer holds: views of its slots by name, digests of their content, and agreement between ranks."""
