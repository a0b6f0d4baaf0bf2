"""Pure parsers: what a probe read, as text, to facts. No I/O and no exception on any text: what isn't there is None."""
