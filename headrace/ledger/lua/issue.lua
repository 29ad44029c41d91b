accept({ 'expected_cursor', COUNT, 'end', FLAG, 'request', NAME }, { 'prompt', BYTES })
local cursor, last, request = tonumber(ARGV[1]), ARGV[2] == '1', ARGV[3]
local reply, err = stored('issue', ARGV[1], request)
if err then return err end
if reply then return { 'issued', reply.cursor } end
if cursor ~= num('cursor') or text('end_of_data') == '1' then return { 'conflict', num('cursor') } end
local next_cursor = cursor + #ARGV - 3
if next_cursor > 10000000000 then refuse('sample ids have ten digits; no more fit') end
local t = now()
for i = 4, #ARGV do
  local n = cursor + i - 4
  local id = string.format('%010d', n)
  call('XADD', key('prompts'), n .. '-1', 'id', id, 'prompt', ARGV[i])
  call('HSET', skey(id), 'state', 'ready', 'issue', n, 'attempt', 0, 'owner', '', 'failures', 0,
    'crashes', 0, 't_issued', t)
end
call('HSET', META, 'cursor', next_cursor, 'issued_total', next_cursor)
if last then call('HSET', META, 'end_of_data', 1) end
store('issue', ARGV[1], request, { cursor = next_cursor })
return { 'issued', next_cursor }
