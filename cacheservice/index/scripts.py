"""The writes to Redis, as Lua: each runs whole or not at all against other writers, and is fenced by the node table.

Every key has a time to live, which those who use it renew: when the last agent is gone for good, so are its keys. Every
script may be sent twice with the same effect as once, so a call whose answer was lost is repeated. They need
Redis 6.2 or newer and one server (keys of several hash tags are touched together); docs/decisions/0005-redis-format.md
names keys and formats. Run by `redis_index.py` only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from cacheservice.index.entry import HEAD_BYTES, MAX_HOLDERS, MAX_VALUE_BYTES
from cacheservice.index.node_record import MAX_NODES

MAX_NAMESAKES = 64
"""Live agents of one name that can be told apart by number."""

NODE_TTL_MS = 10_000
NAME_TTL_S = 86_400


@dataclass(frozen=True, slots=True)
class Script:
    """Source and the name under which Redis keeps it."""

    source: bytes
    sha: bytes = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()
        object.__setattr__(self, "sha", digest)


# A key that holds another type than a string counts as absent: SET replaces it, GET must not fail on it.
_READ = (
    """
local function get(key)
  local value = redis.pcall('GET', key)
  if type(value) == 'string' then return value end
  if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then error(value.err) end
  return false
end
local function count(text)
  local number = tonumber(text)
  if number and number >= 1 and number <= """
    + str(MAX_NODES)
    + """ then return math.floor(number) end
  return 0
end
local function epoch_of(record)
  if record and string.byte(record, 1) == 1 then return string.sub(record, 2, 5) end
  return false
end
"""
)

_SENTINEL = f"""
local function sentinel(prefix, proposal)
  local found = get(prefix .. 'sentinel')
  if found then
    redis.call('EXPIRE', prefix .. 'sentinel', {NAME_TTL_S})
    return found
  end
  redis.call('SET', prefix .. 'sentinel', proposal, 'EX', {NAME_TTL_S})
  return proposal
end
"""

JOIN = Script(
    (
        _READ
        + _SENTINEL
        + f"""
local prefix, name, preferred = ARGV[1], ARGV[2], tonumber(ARGV[3])
local record, may_replace, proposal = ARGV[4], ARGV[5] == '1', ARGV[6]
local epoch = epoch_of(record)

local function is_free(number)
  return not get(prefix .. 'name:' .. number) and not get(prefix .. 'node:' .. number)
end

local function take(number, namesake)
  redis.call('SET', prefix .. 'node:' .. number, record, 'PX', {NODE_TTL_MS})
  redis.call('SET', prefix .. 'name:' .. number, namesake, 'EX', {NAME_TTL_S})
  redis.call('SET', prefix .. 'number:' .. namesake, number, 'EX', {NAME_TTL_S})
  local top = math.max(count(get(prefix .. 'top')), number)
  while top > number and is_free(top) do top = top - 1 end
  redis.call('SET', prefix .. 'top', top, 'EX', {NAME_TTL_S})
  return {{number, sentinel(prefix, proposal)}}
end

-- Joined already: the same number again.
if preferred > 0 and epoch_of(get(prefix .. 'node:' .. preferred)) == epoch then
  local namesake = get(prefix .. 'name:' .. preferred)
  if namesake then return take(preferred, namesake) end
  for nth = 1, {MAX_NAMESAKES} do
    local known = count(get(prefix .. 'number:' .. nth .. ':' .. name))
    if known == 0 or known == preferred then return take(preferred, nth .. ':' .. name) end
  end
end

for nth = 1, {MAX_NAMESAKES} do
  local namesake = nth .. ':' .. name
  local number = count(get(prefix .. 'number:' .. namesake))
  if number > 0 and get(prefix .. 'name:' .. number) == namesake then
    local holder = get(prefix .. 'node:' .. number)
    if not holder or epoch_of(holder) == epoch or epoch_of(holder) == false then
      return take(number, namesake)
    end
    -- Same name and same address: its last incarnation, which crashed less than a lease ago.
    if may_replace and string.sub(holder, 6) == string.sub(record, 6) then
      return take(number, namesake)
    end
  else
    if preferred > 0 and is_free(preferred) then return take(preferred, namesake) end
    for candidate = 1, {MAX_NODES} do
      if is_free(candidate) then return take(candidate, namesake) end
    end
    return {{0, 'full'}}
  end
end
return {{0, 'namesakes'}}
"""
    ).encode()
)
"""ARGV: prefix, name, preferred number or 0, node record, may replace (1/0), proposed sentinel. -> {number or 0,
text}."""

HEARTBEAT = Script(
    (
        _READ
        + _SENTINEL
        + f"""
local prefix, number, record, proposal = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = prefix .. 'node:' .. number
local found = epoch_of(get(key))
if not found then return {{1, ''}} end
if found ~= epoch_of(record) then return {{2, ''}} end
redis.call('PEXPIRE', key, {NODE_TTL_MS})
local namesake = get(prefix .. 'name:' .. number)
if not namesake then return {{1, ''}} end
redis.call('EXPIRE', prefix .. 'name:' .. number, {NAME_TTL_S})
redis.call('EXPIRE', prefix .. 'number:' .. namesake, {NAME_TTL_S})
if count(get(prefix .. 'top')) < tonumber(number) then
  redis.call('SET', prefix .. 'top', number, 'EX', {NAME_TTL_S})
else
  redis.call('EXPIRE', prefix .. 'top', {NAME_TTL_S})
end
return {{0, sentinel(prefix, proposal)}}
"""
    ).encode()
)
"""ARGV: prefix, number, node record, proposed sentinel. -> {0 renewed | 1 expired | 2 another epoch,
sentinel}."""

LEAVE = Script(
    (
        _READ
        + """
local key = ARGV[1] .. 'node:' .. ARGV[2]
if epoch_of(get(key)) == ARGV[3] then return redis.call('DEL', key) end
return 0
"""
    ).encode()
)
"""ARGV: prefix, number, epoch as 4 bytes. -> 1 when the node entry was ours and is gone."""

ANNOUNCE = Script(
    (
        _READ
        + f"""
local prefix, number, epoch, ttl, own = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local fence = epoch_of(get(prefix .. 'node:' .. number))
if not fence then return {{1, 0}} end
if fence ~= epoch then return {{2, 0}} end

local epochs = {{}}
local values = redis.call('MGET', unpack(KEYS))
local dropped = 0
for i, key in ipairs(KEYS) do
  local value, entry, kept = values[i], ARGV[5 + i], {{}}
  if value and #value > {MAX_VALUE_BYTES} then
    dropped = dropped + 1
  elseif value then
    local at, size = 1, #value
    while at <= size do
      local length = string.byte(value, at + {HEAD_BYTES - 1})
      local stop = at + {HEAD_BYTES - 1} + (length or 0)
      if not length or length == 0 or stop > size then
        dropped = dropped + 1
        break
      end
      if string.sub(value, at, at + 2) ~= own then
        local node = string.byte(value, at) + 256 * string.byte(value, at + 1)
        if epochs[node] == nil then epochs[node] = epoch_of(get(prefix .. 'node:' .. node)) end
        local tier, version = string.byte(value, at + 2), string.byte(value, at + 3)
        local is_known = version ~= 1 or (tier >= 1 and tier <= 3)
        if is_known and epochs[node] and epochs[node] == string.sub(value, at + 4, at + 7) then
          kept[#kept + 1] = string.sub(value, at, stop)
        else
          dropped = dropped + 1
        end
      end
      at = stop + 1
    end
  end
  if entry ~= '' then kept[#kept + 1] = entry end
  local first = math.max(1, #kept - {MAX_HOLDERS - 1})
  if #kept == 0 then
    if value then redis.call('DEL', key) end
  elseif entry ~= '' then
    redis.call('SET', key, table.concat(kept, '', first), 'EX', ttl)
  else
    redis.call('SET', key, table.concat(kept, '', first), 'KEEPTTL')
  end
end
return {{0, dropped}}
"""
    ).encode()
)
"""KEYS: chunks. ARGV: prefix, own number, own epoch as 4 bytes, TTL in s, first 3 bytes of own entries, then per key
the packed entry, or '' to withdraw. -> {0 done | 1 node entry expired | 2 another epoch, entries dropped as dead or
malformed}."""
