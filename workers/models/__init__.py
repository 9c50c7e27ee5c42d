"""The decoder, described by data, and the families that it covers."""
