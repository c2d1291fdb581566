"""attnspan: attention whose mask is data."""
