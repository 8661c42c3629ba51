"""What grows with the data: tables of thousands of runs, folders of DomainNet's size, long runs."""
