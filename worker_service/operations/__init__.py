"""Operations beside steps: inspection, a closed list of operations, extensions."""
