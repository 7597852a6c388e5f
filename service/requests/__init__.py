"""Requests from the bytes of a message to a checked `Request`: reading, parsing, validation, preparation in threads.

Reading and parsing import `npuserve.service.rpc.call` and `npuserve.service.access.auth`, for errors and callers. The
other modules import `npuserve.service` (errors, metrics, config), `npuserve.service.text`, `npuserve.service.parsing`,
`npuserve.service.ipc` (messages), `npuserve.npu.step` and the protos.
"""
