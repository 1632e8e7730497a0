"""Logs of engines: how to read them, and how to have a server write one."""
