"""The model side: a frozen backbone shared by all tenants, their private heads, and what ties the two (DESIGN §5).

`catalog` and `process` are light; everything else loads torch. Nothing here knows the bus.
"""
