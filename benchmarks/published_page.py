def write_page(r): pass
