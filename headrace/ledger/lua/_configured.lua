if call('HGET', META, 'schema') ~= '1' then
  return redis.error_reply('HEADRACE the run ' .. PREFIX .. ' is not configured in this server')
end
if is_behind() then return went_back() end
