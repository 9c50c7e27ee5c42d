"""The web page that shows the cluster live, and the stream that feeds it."""
