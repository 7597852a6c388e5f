"""`npuserve collect`: one archive of what a bug report needs, without prompts and secrets.

command: options, parts in order. archive: bounded archive with a manifest. sources: what is read from the machine.
redaction: what is removed from settings and log lines. Imports of `service`: all folders.
"""
