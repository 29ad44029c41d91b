accept({})
-- Everything the audit compares, in one atomic reading: issued_total, length of the samples stream,
-- (place, id, detail) of every member of every place, and of every id its state, owner, whether that
-- owner's set holds it, whether its samples entry exists, tokens and issue number.
local places, records = {}, {}
local function place(name, id, detail)
  local n = #places
  places[n + 1], places[n + 2], places[n + 3] = name, id, detail or ''
end
for _, entry in ipairs(call('XRANGE', key('prompts'), '-', '+')) do place('prompts', entry[2][2], entry[1]) end
for _, name in ipairs({ 'retries', 'parked', 'queued', 'trained' }) do
  for _, id in ipairs(call('ZRANGE', key(name), 0, -1)) do place(name, id) end
end
for _, name in ipairs({ 'inflight', 'training', 'dead', 'dropped' }) do
  local raw = call('HGETALL', key(name))
  for i = 1, #raw, 2 do place(name, raw[i], raw[i + 1]) end
end
for n = 0, num('issued_total') - 1 do
  local id = string.format('%010d', n)
  local v = call('HMGET', skey(id), 'state', 'owner', 'eid', 'tokens', 'issue')
  local owned, entry = 0, 0
  if v[2] and v[2] ~= '' then owned = call('SISMEMBER', key('owned:' .. v[2]), id) end
  if v[3] and v[3] ~= '' then -- one at a time: payloads are large
    local found = call('XRANGE', key('samples'), v[3], v[3])[1]
    if found and found[2][2] == id then entry = 1 end
  end
  for _, value in ipairs({ id, v[1] or '', v[2] or '', owned, entry, v[4] or '', v[5] or '' }) do
    records[#records + 1] = value
  end
end
return { num('issued_total'), call('XLEN', key('samples')), places, records }
