"""Operations: how one is declared, called, authorized, recorded and answered once."""
