accept({})
-- Everything the audit compares, in one atomic reading: issued_total, length of the samples stream,
-- (place, id, detail) of every member of every place, the record of every id, the fields of the meta key, and
-- (owner, id) of every known owner's set. audit.py describes a record.
local places, records, owned_by = {}, {}, {}
local function place(name, id, detail)
  local n = #places
  places[n + 1], places[n + 2], places[n + 3] = name, id, detail or ''
end
for _, entry in ipairs(call('XRANGE', key('prompts'), '-', '+')) do place('prompts', entry[2][2], entry[1]) end
for _, name in ipairs({ 'retries', 'parked', 'queued', 'trained' }) do
  local raw = call('ZRANGE', key(name), 0, -1, 'WITHSCORES')
  for i = 1, #raw, 2 do place(name, raw[i], raw[i + 1]) end
end
local owners = {}
for _, name in ipairs({ 'inflight', 'training', 'dead', 'dropped' }) do
  local raw = call('HGETALL', key(name))
  for i = 1, #raw, 2 do
    place(name, raw[i], raw[i + 1])
    if name == 'inflight' then owners[raw[i + 1]] = true end
  end
end
for _, name in ipairs({ 'members', 'beats' }) do
  for _, owner in ipairs(call('HKEYS', key(name))) do owners[owner] = true end
end
for owner in pairs(owners) do
  for _, id in ipairs(call('SMEMBERS', key('owned:' .. owner))) do
    owned_by[#owned_by + 1], owned_by[#owned_by + 2] = owner, id
  end
end
for n = 0, num('issued_total') - 1 do
  local id = string.format('%010d', n)
  local v = call('HMGET', skey(id), 'state', 'owner', 'eid', 'tokens', 'issue', 'attempt', 'step', 'lineage',
    'window', 'seq', 'reason', 'max_version')
  for i = 1, 12 do v[i] = v[i] or '' end
  local owned, entry = 0, ''
  if v[2] ~= '' then owned = call('SISMEMBER', key('owned:' .. v[2]), id) end
  if v[3] ~= '' then -- one entry at a time: payloads are large
    local found = call('XRANGE', key('samples'), v[3], v[3])[1]
    if found and found[2][2] == id then entry = found[2][4] end
  end
  local prompt, work = 1, 1 -- looked up only where still needed: most samples are trained
  if v[1] ~= 'trained' then prompt = call('HEXISTS', skey(id), 'prompt') end
  if v[1] == 'parked' then work = call('HEXISTS', skey(id), 'work') end
  for _, value in ipairs({ id, v[1], v[2], owned, entry, v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12],
    prompt, work }) do
    records[#records + 1] = value
  end
end
return { num('issued_total'), call('XLEN', key('samples')), places, records, call('HGETALL', META), owned_by }
