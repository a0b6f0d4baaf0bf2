"""Recorded output of service managers.

systemd's output is from systemd 252 with the service installed. launchctl's was published by its
users. PowerShell's has the form that our own script prints.
"""

SYSTEMD_RUNNING = """\
MainPID=3487
Result=success
NRestarts=1
ExecMainStatus=0
MemoryCurrent=[not set]
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
ActiveEnterTimestamp=Sun 2026-11-22 11:35:06 UTC
"""
SYSTEMD_NONE = """\
MainPID=0
Result=success
NRestarts=0
ExecMainStatus=0
MemoryCurrent=[not set]
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=
ActiveEnterTimestamp=
"""
SYSTEMD_FAILED = """\
MainPID=0
Result=exit-code
NRestarts=0
ExecMainStatus=3
MemoryCurrent=18446744073709551615
LoadState=loaded
ActiveState=failed
SubState=failed
UnitFileState=enabled
ActiveEnterTimestamp=
"""
NO_BUS = "Failed to connect to bus: No medium found\n"

LAUNCHD_RUNNING = """\
gui/501/org.localllm.serve = {
	active count = 1
	path = /Users/me/Library/LaunchAgents/org.localllm.serve.plist
	type = LaunchAgent
	state = running

	program = /Users/me/.venv/bin/python
	arguments = {
		/Users/me/.venv/bin/python
		-m
		localllm
		serve
	}

	runs = 3
	pid = 913
	immediate reason = speculative
	last exit code = (never exited)

	spawn type = interactive (4)
	endpoints = {
		"service" = {
			state = active
			active count = 1
		}
	}
}
"""
LAUNCHD_FAILED = """\
gui/501/org.localllm.serve = {
	active count = 0
	state = not running
	runs = 1
	last exit code = 78: EX_CONFIG
	endpoints = {
		state = active
	}
}
"""

WINDOWS_RUNNING = (
    '{"state":"Running","since":"2026-11-22T11:35:06.0000000+01:00","result":267009}\r\n'
)
WINDOWS_FAILED = '{"since":"2026-11-22T11:35:06.0000000+01:00","result":3,"state":"Ready"}\r\n'
