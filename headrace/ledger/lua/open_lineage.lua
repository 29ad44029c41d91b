accept({ 'expected_lineage', COUNT, 'request', NAME })
check_places()
local expected, request = ARGV[1], ARGV[2]
local reply, err = stored('open_lineage', expected, request)
if err then return err end
local version = num('version')
if reply and tostring(reply.lineage) == text('lineage') then return { 'ok', reply.lineage, version } end
if expected ~= text('lineage') then return { 'conflict', num('lineage'), version } end
local lineage = num('lineage') + 1
local fields = call('HKEYS', META)
for _, field in ipairs(fields) do
  if string.sub(field, 1, 3) == 'tw:' then call('HDEL', META, field) end
end
call('HSET', META, 'lineage', lineage, 'phase', 'adopting', 'held', 1, 'window', version + 1,
  'final', 0, 'ending', 0, 'completed', 0, 'trimmed', -1)
call('DEL', key('members'))
store('open_lineage', expected, request, { lineage = lineage })
return { 'ok', lineage, version }
