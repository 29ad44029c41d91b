accept({ 'term', COUNT, 'round', COUNT, 'lineage', COUNT, 'version', COUNT, 'digest', TEXT, 'validate', FLAG,
  'final', FLAG, 'max_required', COUNT }, { 'member', NAME })
-- max_required 0: unchanged.
local version, round = tonumber(ARGV[4]), tonumber(ARGV[2])
if ARGV[1] ~= text('term') or round ~= num('round') or ARGV[3] ~= text('lineage') then
  return fenced('commit')
end
local phase, current = text('phase'), num('version')
if version == current and round == num('commit_round') and phase == 'idle' then return { 'ok', 0 } end
if phase ~= 'syncing' or version ~= current + 1 then return fenced('commit') end
local open = 0
for _, window in ipairs(call('HVALS', key('training'))) do
  if tonumber(window) < version then open = open + 1 end
end
if open > 0 then return { 'training', open } end

for _, field in ipairs(call('HKEYS', META)) do
  if string.sub(field, 1, 3) == 'tw:' and tonumber(string.sub(field, 4)) < version then
    call('HDEL', META, field)
  end
end
call('DEL', key('members'))
for i = 9, #ARGV do call('HSET', key('members'), ARGV[i], version) end
call('HSET', META, 'version', version, 'digest', ARGV[5], 'commit_round', round, 'held', 0,
  'phase', 'idle', 'final', ARGV[7], 'val:open', 0)
if ARGV[8] ~= '0' then call('HSET', META, 'max_required', ARGV[8]) end
if num('window') < version then call('HSET', META, 'window', version) end
if ARGV[6] == '1' then
  call('DEL', key('val:todo'), key('val:taken'), key('val:done'), key('val:results:' .. version))
  local rows = call('HKEYS', key('val:rows'))
  for _, row in ipairs(rows) do call('ZADD', key('val:todo'), row, row) end
  call('HSET', META, 'val:version', version, 'val:open', #rows > 0 and 1 or 0)
end
return { 'ok', 0 }
