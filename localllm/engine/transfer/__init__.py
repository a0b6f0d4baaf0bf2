"""KV transfer: one server asks another one for KV.

wire.py has the format. The server that is asked sends KV in engine/kv_sending.py. The server that
asks decides in conductor.py, receives in fetching.py and imports in engine/admission.py.
"""
