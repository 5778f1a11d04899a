"""Runs attempts at jobs as processes of this machine, each supervised by a process of its own.

launcher → supervisor → (sandbox) → sandbox_init → the user's ranks. Only files and a lock connect the launcher and the
supervisor, so that the platform may be killed and restarted meanwhile. The supervisor and `sandbox_init` both end the
user's code, so that it ends if one of them is killed. Kept free of imports: the supervisor must start quickly.
"""
