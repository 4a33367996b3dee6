package podprovider

import (
	"encoding/json"
	"net/netip"
	"os"
	"strings"
	"time"
)

// leaseIP looks up the address leased to mac in the lease file: [{"mac","ip","expiry"}]. A file that is missing, or that
// another process is writing, yields no address and never an error: the next probe looks again.
func leaseIP(path, mac string, now time.Time) string {
	if path == "" || mac == "" {
		return ""
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return parseLeases(data, mac, now)
}

func parseLeases(data []byte, mac string, now time.Time) string {
	var leases []struct {
		MAC    string          `json:"mac"`
		IP     string          `json:"ip"`
		Expiry json.RawMessage `json:"expiry"`
	}
	if json.Unmarshal(data, &leases) != nil {
		return ""
	}
	for _, l := range leases {
		if !strings.EqualFold(l.MAC, mac) || expired(l.Expiry, now) {
			continue
		}
		if a, err := netip.ParseAddr(l.IP); err == nil {
			return a.String()
		}
	}
	return ""
}

// expired understands RFC 3339 and seconds since 1970. Anything else, and 0, means that the lease does not end.
func expired(raw json.RawMessage, now time.Time) bool {
	var t time.Time
	if json.Unmarshal(raw, &t) == nil {
		return !t.IsZero() && t.Before(now)
	}
	var seconds int64
	if json.Unmarshal(raw, &seconds) == nil {
		return seconds != 0 && seconds < now.Unix()
	}
	return false
}
