"""What each editor and agent needs to use this server, and the calls that it makes."""
