"""One file per tool-call format (related formats share one). Its FORMATS are registered."""
