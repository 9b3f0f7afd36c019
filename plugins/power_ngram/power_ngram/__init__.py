"""Zero-weight drafters: they propose what followed the same tokens earlier in the request."""
