"""What is on this disk: resolve a MODEL reference to files, download, adopt what other apps hold,
remove."""
