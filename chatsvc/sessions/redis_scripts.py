"""The Lua scripts of the Redis store. Each touches the keys of one session only and checks the tenant first.

Keys of every script: 1 = the session's hash (tenant, title, system, created_at, updated_at, size, turn), 2 = its
messages (hash of message id -> "<seq>:<json>"). First two arguments: tenant, life in milliseconds. Every script that
finds the session extends the life of both keys. Commands of Redis 6.2.

``turn`` is the lock of the running answer: "<message id>@<owner>", the fencing token, or empty. Who appends a running
answer takes it, its end gives it back, and whoever finds the owner dead takes it away by marking the answer
interrupted. Nothing is written to an answer whose token does not hold the lock: an owner that comes back from the dead
finds its answer closed.
"""

from __future__ import annotations

NO_SESSION = -1
NO_MESSAGE = -2
FULL = -3
OVER = -4

_FIND = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return -1 end
"""

_EXTEND = """
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
"""

_INSERT = """
if turn ~= '' then
  local held = redis.call('HGET', KEYS[1], 'turn')
  if held and held ~= '' and held ~= turn then return held end
end
local count = redis.call('HLEN', KEYS[2])
local size = tonumber(redis.call('HGET', KEYS[1], 'size') or '0')
local fresh = {}
for i = first, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[2], ARGV[i]) == 0 then
    fresh[#fresh + 1] = i
    size = size + #ARGV[i + 1]
  end
end
if count + #fresh > max_messages or size > max_size then return -3 end
for _, i in ipairs(fresh) do
  redis.call('HSET', KEYS[2], ARGV[i], string.format('%d:', count) .. ARGV[i + 1])
  count = count + 1
end
redis.call('HSET', KEYS[1], 'size', string.format('%d', size))
if turn ~= '' and #fresh > 0 then redis.call('HSET', KEYS[1], 'turn', turn) end
"""

CREATE = (
    """
local known = redis.call('HGET', KEYS[1], 'nonce')
if known then return known == ARGV[3] and 1 or 0 end
local first, max_messages, max_size, turn = 11, tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
"""
    + _INSERT
    + """
redis.call('HSET', KEYS[1], 'tenant', ARGV[1], 'nonce', ARGV[3], 'title', ARGV[7], 'system', ARGV[8],
           'created_at', ARGV[9], 'updated_at', ARGV[10])
"""
    + _EXTEND
    + "return 1"
)
"""Arguments 3..: nonce of this call, limits (messages, bytes), the running answer's token or empty, title, system,
created_at, updated_at, then id and JSON of each message. 1: made (a retry after a lost reply included), 0: the id is
taken."""

GET = _FIND + _EXTEND + "return {redis.call('HGETALL', KEYS[1]), redis.call('HVALS', KEYS[2])}"

PATCH = (
    _FIND
    + """
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
"""
    + _EXTEND
    + "return {redis.call('HGETALL', KEYS[1]), redis.call('HVALS', KEYS[2])}"
)
"""Arguments 3..: field and value, as many as there are."""

DELETE = _FIND + "redis.call('DEL', KEYS[1], KEYS[2]) return 1"

APPEND = (
    _FIND
    + "local first, max_messages, max_size, turn = 7, tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]"
    + _INSERT
    + "redis.call('HSET', KEYS[1], 'updated_at', ARGV[3])"
    + _EXTEND
    + "return 1"
)
"""Arguments 3..: updated_at, limits (messages, bytes), the running answer's token or empty, then id and JSON of each
message. A message whose id is already there is skipped, so a retry after a lost reply adds nothing twice. A string: the
token of the answer that is running, so that no other can be appended."""

UPDATE = (
    _FIND
    + """
local old = redis.call('HGET', KEYS[2], ARGV[4])
if not old then return -2 end
local seq = string.match(old, '^%d+:')
local holds = redis.call('HGET', KEYS[1], 'turn') == ARGV[7]
if ARGV[6] ~= '' then
  if old ~= ARGV[6] then return 0 end
elseif old ~= seq .. ARGV[5] then
  if not holds then return -4 end
end
redis.call('HSET', KEYS[2], ARGV[4], seq .. ARGV[5])
redis.call('HINCRBY', KEYS[1], 'size', #ARGV[5] + #seq - #old)
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'updated_at', ARGV[3]) end
if holds and ARGV[8] == 'ended' then redis.call('HSET', KEYS[1], 'turn', '') end
"""
    + _EXTEND
    + "return 1"
)
"""Arguments 3..: updated_at (or empty: leave it), message id, new JSON, the stored value that must still be there (or
empty: the token must hold the lock, or the message be already as it is to be), token, "ended" to give the lock back.
0: the value was another; -4: the token does not hold the lock."""

REWRITE = (
    _FIND
    + """
for i = 3, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[2], ARGV[i]) == 0 then return -2 end
end
for i = 3, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[2], ARGV[i])
  local seq = string.match(old, '^%d+:')
  redis.call('HSET', KEYS[2], ARGV[i], seq .. ARGV[i + 1])
  redis.call('HINCRBY', KEYS[1], 'size', #ARGV[i + 1] + #seq - #old)
end
"""
    + _EXTEND
    + "return 1"
)
"""Arguments 3..: id and new JSON of each message."""
