package contract

// Masquerade asks that the guest of a pod has a private address on the pod's network. The node translates between that and the address
// of the pod. Its fields are those of KubeVirt.
type Masquerade struct {
	CIDR  string           `json:"cidr,omitempty"`  // of the guest's IPv4 network; "" is 10.0.2.0/24
	CIDR6 string           `json:"cidr6,omitempty"` // of its IPv6 network; "" is fd10:0:2::/120
	Ports []MasqueradePort `json:"ports,omitempty"` // of the pod's address that lead to the guest; none: all
}

// MasqueradePort is a range of ports.
type MasqueradePort struct {
	Protocol string `json:"protocol,omitempty"` // TCP, UDP or SCTP; "" is TCP
	Port     int32  `json:"port"`
	Last     int32  `json:"last,omitempty"` // of the range; 0 is Port
}

// ParseMasquerade returns what KeyMasquerade asks for; nil if there is no such annotation. Every error is of type Errors.
func ParseMasquerade(annotations map[string]string) (*Masquerade, error) {
	r := &reader{from: annotations}
	var m Masquerade
	if !r.document(KeyMasquerade, &m, `{"cidr": "10.0.2.0/24", "cidr6": "fd10:0:2::/120", "ports": [{"protocol": "TCP", "port": 80}]}`) {
		return nil, r.errs.err()
	}
	return &m, nil
}

// Apply writes m to annotations.
func (m Masquerade) Apply(annotations map[string]string) {
	put(annotations, KeyMasquerade, document(m, false))
}
