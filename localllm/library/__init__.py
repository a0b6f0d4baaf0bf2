"""Models on this disk: resolve a MODEL reference to files, download, adopt other apps' files,
remove."""
