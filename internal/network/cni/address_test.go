package cni

import (
	"encoding/json"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestAddress(t *testing.T) {
	for name, tt := range map[string]struct {
		result string
		want   vm.NIC
	}{
		"none": {`{"routes": [{"dst": "10.9.0.0/16", "gw": "10.1.0.9"}]}`, vm.NIC{}},
		"one": {
			`{"ips": [{"address": "10.1.0.2/24", "gateway": "10.1.0.1"}]}`,
			vm.NIC{IP: "10.1.0.2", Prefix: 24, Gateway: "10.1.0.1"},
		},
		"gateway of the route": {
			`{"ips": [{"address": "10.1.0.2/24"}], "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]}`,
			vm.NIC{IP: "10.1.0.2", Prefix: 24, Gateway: "10.1.0.1"},
		},
		"no gateway": {`{"ips": [{"address": "10.1.0.2/24"}]}`, vm.NIC{IP: "10.1.0.2", Prefix: 24}},
		"both families, the other way round": {
			`{"ips": [{"address": "fd00::2/64", "gateway": "fd00::1"}, {"address": "10.1.0.2/24", "gateway": "10.1.0.1"}, {"address": "fd01::2/64"}, {"address": "10.2.0.2/16"}],
			  "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.9"}, {"dst": "fd09::/32"}, {"dst": "fd0a::/32", "gw": "10.1.0.9"}]}`,
			vm.NIC{
				IP: "10.1.0.2", Prefix: 24, Gateway: "10.1.0.1", IPv6: "fd00::2", Addresses: []string{"10.2.0.2/16", "fd00::2/64", "fd01::2/64"},
				Routes: []vm.Route{{To: "10.9.0.0/16", Via: "10.1.0.9"}, {To: "fd09::/32", Via: "fd00::1"}, {To: "::/0", Via: "fd00::1"}},
			},
		},
		"IPv6 alone": {
			`{"ips": [{"address": "fd00::2/64", "gateway": "fe80::1"}], "routes": [{"dst": "::/0"}]}`,
			vm.NIC{IP: "fd00::2", Prefix: 64, Gateway: "fe80::1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var res types100.Result
			if err := json.Unmarshal([]byte(tt.result), &res); err != nil {
				t.Fatal(err)
			}
			var got vm.NIC
			address(&got, res.IPs, res.Routes)
			if d := diff.Of(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}
