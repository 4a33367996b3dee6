package cocoond

import (
	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/network/bridge"
)

// networkCollector reports on the bridge network, at every scrape.
type networkCollector struct{ net *bridge.Network }

var (
	dhcpMessages = prometheus.NewDesc("cocoon_dhcp_messages_total",
		"DHCP messages of guests by what was done about them, and by family (ipv4, ipv6); declined means that another machine has a guest's address.", []string{"result", "family"}, nil)
	networkAddresses = prometheus.NewDesc("cocoon_network_addresses", "Addresses of the bridge network that VMs can have, and how many are leased.", []string{"state"}, nil)
	damagedLeases    = prometheus.NewDesc("cocoon_network_lease_files_damaged_total", "Lease files of the bridge network that were damaged and set aside; the leases were made anew.", nil, nil)
)

func (networkCollector) Describe(out chan<- *prometheus.Desc) {
	out <- dhcpMessages
	out <- networkAddresses
	out <- damagedLeases
}

func (c networkCollector) Collect(out chan<- prometheus.Metric) {
	for family, messages := range map[string]map[string]uint64{"ipv4": c.net.DHCPMessages(), "ipv6": c.net.DHCPv6Messages()} {
		for result, n := range messages {
			out <- prometheus.MustNewConstMetric(dhcpMessages, prometheus.CounterValue, float64(n), result, family)
		}
	}
	out <- prometheus.MustNewConstMetric(damagedLeases, prometheus.CounterValue, float64(c.net.DamagedLeases()))
	leased, total := c.net.Addresses()
	out <- prometheus.MustNewConstMetric(networkAddresses, prometheus.GaugeValue, float64(leased), "leased")
	out <- prometheus.MustNewConstMetric(networkAddresses, prometheus.GaugeValue, float64(total-leased), "free")
}
