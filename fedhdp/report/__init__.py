"""Pages: runs, plans, costs and ledgers as one self-contained HTML file each, without requests to anywhere."""
