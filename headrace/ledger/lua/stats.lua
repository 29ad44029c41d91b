accept({})
-- One atomic reading. Counts are the sizes of the places, not counters.
local function group(name)
  local out = {}
  for _, reason in ipairs(call('HVALS', key(name))) do out[reason] = (out[reason] or 0) + 1 end
  return out
end
local meta, fields, groups = call('HGETALL', META), {}, {}
for _, name in ipairs({ 'requeued', 'kept', 'fenced', 'dead', 'dropped' }) do groups[name] = {} end
for i = 1, #meta, 2 do
  local head, rest = string.match(meta[i], '^(%a+):(.*)$')
  if head and groups[head] then groups[head][rest] = tonumber(meta[i + 1])
  else fields[meta[i]] = meta[i + 1]
  end
end
local members, raw = {}, call('HGETALL', key('members'))
for i = 1, #raw, 2 do members[raw[i]] = tonumber(raw[i + 1]) end
local owners = {}
for _, owner in ipairs(call('HVALS', key('inflight'))) do owners[owner] = (owners[owner] or 0) + 1 end
local age, oldest = 0, call('ZRANGE', key('queued'), 0, 0)[1]
if oldest then age = tonumber(now()) - tonumber(call('HGET', skey(oldest), 't_finished')) end
local queued, training = call('ZCARD', key('queued')), call('HLEN', key('training'))
return cjson.encode({
  meta = fields, members = members, in_flight_by_owner = owners,
  requeued = groups.requeued, kept = groups.kept, fenced_by = groups.fenced, died = groups.dead,
  left = groups.dropped,
  dead_reasons = group('dead'), dropped_reasons = group('dropped'),
  trained_since_sync = trained_since_sync(), oldest_queued_age_s = age, stream = call('XLEN', key('samples')),
  counts = {
    ready = ready_count(), in_flight = call('HLEN', key('inflight')), parked = call('ZCARD', key('parked')),
    queued = queued, training = training, trained = call('ZCARD', key('trained')),
    dead = call('HLEN', key('dead')), dropped = call('HLEN', key('dropped')),
  },
  val_total = call('HLEN', key('val:rows')),
  val_done = call('HLEN', key('val:results:' .. (fields['val:version'] or '-1'))),
})
