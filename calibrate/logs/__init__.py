"""A profile from the logs of a running server (`calibrate from-logs`).

`read` gives records of steps or of requests; `parameters` says what may be fitted; `steps` and
`replay` predict the records; `solve` fits; `report` compares before and after.
"""
