"""Generated gRPC stubs of the contract in ``proto/paceline/v1``. Do not edit; run ``make proto``.
"""
