"""What a sweep is apart from Ray: its options, its journal, its trials, its report."""
