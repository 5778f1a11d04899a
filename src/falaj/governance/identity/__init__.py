"""Users, service accounts, groups, tokens and workspaces, and who a credential belongs to."""
