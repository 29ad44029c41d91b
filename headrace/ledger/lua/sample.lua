accept({ 'id', TEXT })
local names = { 'state', 'issue', 'attempt', 'owner', 'failures', 'crashes', 'min_version', 'max_version',
  'tokens', 'window', 'step', 'lineage', 'reason', 'detail', 't_issued', 't_taken', 't_finished', 't_claimed' }
local out = {}
for i, value in ipairs(call('HMGET', skey(ARGV[1]), unpack(names))) do
  if value then
    out[#out + 1] = names[i]
    out[#out + 1] = value
  end
end
return out
