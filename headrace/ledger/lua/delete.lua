accept({ 'ledger', TEXT, 'writes', COUNT })
-- `ledger` and `writes` were read some time ago. If nothing was written since, delete every key of the run.
local ledger, writes = ARGV[1], ARGV[2]
if ledger ~= text('ledger') or tonumber(writes) ~= num('writes') then return { 'refused' } end
local found, cursor = {}, '0'
repeat
  local page = call('SCAN', cursor, 'MATCH', PREFIX .. '*', 'COUNT', 10000)
  cursor = page[1]
  for _, name in ipairs(page[2]) do found[#found + 1] = name end
until cursor == '0'
for i = 1, #found, 1000 do call('UNLINK', unpack(found, i, math.min(i + 999, #found))) end
wrote = false -- counting this write would recreate the meta key
return { 'ok' }
