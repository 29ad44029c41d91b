accept({ 'owner', NAME, 'version', VERSION, 'count', COUNT, 'request', NAME })
local owner, version, count, request = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local function answer(rows)
  local out = {}
  for _, row in ipairs(rows) do
    if call('HGET', key('val:taken'), row) == owner then
      out[#out + 1] = row
      out[#out + 1] = call('HGET', key('val:rows'), row)
    end
  end
  return out
end
if text('val:open') ~= '1' or version ~= text('val:version') or version ~= text('version')
  or call('HEXISTS', key('members'), owner) == 0 then
  return {}
end
local reply, err = stored('val_take', owner, request)
if err then return err end
if reply then return answer(reply.rows) end
if text('held') == '1' or count < 1 then return {} end
local rows = call('ZRANGE', key('val:todo'), 0, count - 1)
if #rows == 0 then return {} end
for _, row in ipairs(rows) do
  call('ZREM', key('val:todo'), row)
  call('HSET', key('val:taken'), row, owner)
end
store('val_take', owner, request, { rows = rows })
return answer(rows)
