accept({ 'max_required', POSITIVE, 'claim_size', POSITIVE, 'max_retries', COUNT, 'max_crashes', COUNT,
  'total', COUNT, 'fingerprint', JSON })
check_places()
local print = ARGV[6]
local schema = call('HGET', META, 'schema')
if schema and schema ~= '1' then
  return redis.error_reply('HEADRACE the run ' .. PREFIX .. ' has ledger schema ' .. schema .. ', not 1')
end
if schema and is_behind() or not schema and saw_it_begin() then return went_back() end
if schema and text('fingerprint') ~= print then return { 'mismatch', text('fingerprint'), 0 } end
if schema and text('ledger') == '' then -- created by an earlier release
  call('HSET', META, 'ledger', redis.sha1hex(PREFIX .. now() .. print))
end
local created = 0
if not schema then
  created = 1
  local ledger = KNOWN and split(KNOWN) or ''
  if ledger == '' then ledger = redis.sha1hex(PREFIX .. now() .. print) end
  call('HSET', META, 'schema', 1, 'ledger', ledger, 'fingerprint', print, 'version', -1, 'digest', '',
    'term', 0, 'round', 0, 'commit_round', -1, 'phase', 'idle', 'held', 1, 'lineage', 0,
    'window', 0, 'cursor', 0, 'issued_total', 0, 'end_of_data', 0, 'final', 0, 'fenced', 0, 'seq', 0, 'trimmed', -1,
    'val:version', -1, 'val:open', 0)
end
-- After the first commit the gate belongs to the trainer: commits change it.
if num('version') < 0 then call('HSET', META, 'max_required', ARGV[1]) end
call('HSET', META, 'claim_size', ARGV[2], 'max_retries', ARGV[3],
  'max_crashes', ARGV[4], 'total', ARGV[5])
return { 'ok', print, created }
