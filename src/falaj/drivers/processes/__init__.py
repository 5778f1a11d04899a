"""Runs attempts at jobs as processes of this machine, each watched by a small process of its own.

launcher → shim → (sandbox) → inside → the user's ranks. Only files and a lock tie the launcher to the shim, so
that the platform may be killed and restarted meanwhile; the shim and `inside` end the user's code, whichever
of the two is killed. Kept empty: the shim must start quickly.
"""
