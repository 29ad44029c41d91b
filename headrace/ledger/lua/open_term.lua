accept({})
check_places()
bump('term')
return call('HMGET', META, 'term', 'version', 'round', 'phase', 'lineage', 'digest')
